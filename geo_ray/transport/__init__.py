"""Everything that crosses a socket: between regions (`endpoint`) and inside one (`lan`)."""
