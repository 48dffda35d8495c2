"""The whole recipe in one command: from captioned pictures to generated, ranked and scored ones, with a report."""
