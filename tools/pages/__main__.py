from .generated import write_pages

write_pages()
