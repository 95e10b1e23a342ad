"""Programs that tests share: networks by name (`networks`), and what one device computes for them (`one_device`)."""
