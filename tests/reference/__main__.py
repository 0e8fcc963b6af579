"""`python -m tests.reference`: writes docs/reference anew. Prints the pages that changed."""

from tests.reference.pages import FOLDER, pages


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(path)


if __name__ == "__main__":
    main()
