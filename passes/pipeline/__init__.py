"""Pipeline schedules: orders as data, one event simulation."""
