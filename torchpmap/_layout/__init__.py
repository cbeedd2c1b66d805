"""Named axes and meshes, and which device holds which block of a value. Nothing here runs."""
