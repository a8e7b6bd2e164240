"""The laboratory: reads disks, takes time, draws pictures. Needs the extra `icmixup[lab]`."""
