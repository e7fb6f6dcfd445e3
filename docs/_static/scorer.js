// The search's own scores, and one point more for Start: among pages that match alike it comes first.
var Scorer = {
    score: ([page, , , , score]) => score + (page === "start" ? 1 : 0),
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
}
