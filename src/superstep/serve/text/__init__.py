"""Between token ids and text: detokenization, stop strings, chat templates, tool calls, structured output."""
