"""Makes a failure of one rank known on all ranks; this room does not depend on modules or gradients."""
