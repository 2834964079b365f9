"""Changes of the target's cache: rows realigned, recurrent states rewound, a drafter's context kept with it."""
