// A button on each block of code, not on outputs, that copies it; code in tables may break behind a dot, and on a narrow
// screen each cell says what its column is.
document.addEventListener("DOMContentLoaded", () => {
    for (const word of document.querySelectorAll("td code .pre")) {
        const [first, ...others] = word.textContent.split(/(?<=[a-z][.(=_,])(?=.{3})/)
        word.replaceChildren(first, ...others.flatMap((part) => [document.createElement("wbr"), part]))
    }
    for (const block of document.querySelectorAll("[class*=highlight-]:not(.highlight-text) > div.highlight")) {
        const button = document.createElement("button")
        button.className = "copy"
        button.textContent = "Copy"
        button.addEventListener("click", async () => {
            await navigator.clipboard.writeText(block.querySelector("pre").innerText)
            button.textContent = "Copied"
            setTimeout(() => (button.textContent = "Copy"), 2000)
        })
        block.append(button)
    }
    for (const table of document.querySelectorAll("table.docutils")) {
        const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim().replace(/=$/, ""))
        for (const row of table.querySelectorAll("tbody tr")) {
            ;[...row.cells].forEach((cell, i) => i && heads[i] && (cell.dataset.head = heads[i]))
        }
    }
})
