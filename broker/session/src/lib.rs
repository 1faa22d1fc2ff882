//! Pure state machine of a broker session: members, mailboxes, limits and the journal's records.
