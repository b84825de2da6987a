"""What reproduces papers, measures costs and fills the board; none of it is part of the package."""
