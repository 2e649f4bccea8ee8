"""One module for each library, with a `prepare`. They have the names of what they import, so they are in a package."""
