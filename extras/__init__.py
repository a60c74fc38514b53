"""What the package neither needs nor imports: leaving out branches at inference. Shipped as `flowscope.extras`."""
