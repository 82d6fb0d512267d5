"""The check at each start on a CPU that a row's bits do not depend on its neighbors."""
