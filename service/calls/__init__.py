"""Each call of each method: authentication, admission, status, log line and trace."""
