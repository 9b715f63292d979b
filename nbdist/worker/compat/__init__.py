"""The only files of the workers that touch private names of other libraries, one each."""
