"""From costed layers to one step: stages, their pipeline, what runs beside what, and what a step does once."""
