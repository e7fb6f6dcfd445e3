// A button on each block of code that copies it; and code in tables may break behind a dot, where the screen is narrow.
document.addEventListener("DOMContentLoaded", () => {
    for (const word of document.querySelectorAll("td code .pre")) {
        const [first, ...others] = word.textContent.split(/(?<=[a-z][.(=_,])(?=.{3})/)
        word.replaceChildren(first, ...others.flatMap((part) => [document.createElement("wbr"), part]))
    }
    for (const block of document.querySelectorAll("div.highlight")) {
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
})
