"""The version, alone in a file so that builds read it without importing the package."""

VERSION = "0.1.0"
