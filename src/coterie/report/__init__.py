"""What people look at: one page with tables and figures that needs no network."""
