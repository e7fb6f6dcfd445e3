// A button on each block of code that copies it.
document.addEventListener("DOMContentLoaded", () => {
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
