"""What all packages of the library use: private, and free to change."""
