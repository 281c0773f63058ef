"""Where experts live: placements, what they cost, and the methods that find them."""
