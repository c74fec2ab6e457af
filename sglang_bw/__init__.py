"""SGLang for Blackwell: patch series, wheel builder and launcher for speculative decoding."""

__version__ = "0.1.0"
