"""Makes `env_cases` importable for the tests of the folders below."""

import env_cases  # noqa: F401
