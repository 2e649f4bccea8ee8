"""One module a library, each with a `prepare`. They share names with what they import, so they stand in a package."""
