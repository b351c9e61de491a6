"""A parser of answers that goes by the number of letters."""

from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


class ByPlace:
    """Three letters of reasoning, three of text, then a call."""

    def __init__(self) -> None:
        self.place = 0

    def push(self, delta_text: str) -> list[Event]:
        events: list[Event] = []
        for letter in delta_text:
            if self.place < 6:
                events.append(ReasoningDelta(letter) if self.place < 3 else TextDelta(letter))
            elif self.place == 6:
                events += [ToolCallStart(0, "toolu_1", "f"), ToolCallArguments(0, '{"x": "')]
            else:
                events.append(ToolCallArguments(0, letter if letter.isalpha() else "."))
            self.place += 1
        return events

    def finish(self) -> list[Event]:
        return [ToolCallArguments(0, '"}')]
