"""What somebody outside the package adds to it, one file each."""
