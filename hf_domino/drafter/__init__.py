"""Where the methods stood in earlier versions; files of adapters name the module inside."""
