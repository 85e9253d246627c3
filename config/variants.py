LISTS = {}
