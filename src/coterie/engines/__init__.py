"""What serving engines accept: placement files and the launch flags that go with them."""
