"""What the rest of the package neither needs nor imports: leaving out branches at inference."""
