"""A streamer that tests look into."""

from __future__ import annotations

from transformers.generation.streamers import BaseStreamer


class Recorder(BaseStreamer):
    """Keeps what is streamed."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")
