"""What was routed where: traces, their importers, splits and synthetic stand-ins."""
