"""The lab: trains and compares methods on your data. Needs the extra `icmixup[lab]`."""
