"""What the package neither needs nor imports, shipped as `flowscope.extras`: inference without branches, figures."""
