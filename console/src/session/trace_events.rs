//! The events that traced tasks record, as a mask. Pure.

use libpvm::trace_events::{EVENTS, EventMask};

/// Events that are not caused by a call. They are always recorded and cannot be selected.
const UNSELECTABLE_EVENTS: [&str; 5] = ["newtask", "endtask", "spntask", "timing", "profiling"];

/// Events selected by `trace xpvm` and in a new console: those that the display program XPVM shows.
const XPVM_EVENTS: [&str; 24] = [
    "addmhf",
    "barrier",
    "bcast",
    "delmhf",
    "exit",
    "joingroup",
    "kill",
    "lvgroup",
    "mcast",
    "mhf_invoke",
    "mytid",
    "nrecv",
    "parent",
    "precv",
    "probe",
    "psend",
    "recv",
    "recvf",
    "send",
    "sendsig",
    "siblings",
    "spawn",
    "trecv",
    "user_defined",
];

/// Returns number and name of the events that can be selected.
pub(crate) fn selectable_events() -> impl Iterator<Item = (usize, &'static str)> {
    let named = EVENTS
        .iter()
        .enumerate()
        .map(|(event, name)| (event, name.to_str().expect("names are ASCII")));
    named.filter(|(_, name)| !UNSELECTABLE_EVENTS.contains(name))
}

/// Returns the mask for a traced task: the selected events and those that are always recorded.
pub(crate) fn with_unselectable_events(mask: &EventMask) -> EventMask {
    let mut mask_with_always = *mask;
    UNSELECTABLE_EVENTS
        .into_iter()
        .filter_map(EventMask::event_number)
        .for_each(|event| mask_with_always.set(event, true));
    mask_with_always
}

/// Returns the mask of a new console.
pub(crate) fn xpvm_mask() -> EventMask {
    let mut mask = EventMask::none();
    XPVM_EVENTS
        .into_iter()
        .filter_map(EventMask::event_number)
        .for_each(|event| mask.set(event, true));
    mask
}

/// Selects or deselects events by name. Returns false if no event has this name.
pub(crate) fn select(mask: &mut EventMask, on: bool, name: &str) -> bool {
    let mut found = false;
    for (event, _) in selectable_events().filter(|(_, event)| name == "*" || *event == name) {
        mask.set(event, on);
        found = true;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events are selected by name or all at once.
    #[test]
    fn events_are_selected_by_name_or_all() {
        let mut mask = EventMask::none();
        let selected = |mask: &EventMask| {
            selectable_events()
                .filter(|(event, _)| mask.contains(*event))
                .count()
        };
        assert!(
            select(&mut mask, true, "send")
                && mask.contains(EventMask::event_number("send").expect("an event"))
        );
        assert!(!select(&mut mask, true, "x") && !select(&mut mask, true, "newtask"));
        assert!(select(&mut mask, true, "*"));
        assert_eq!(selected(&mask), 104);
        select(&mut mask, false, "*");
        assert_eq!(mask, EventMask::none());
        let told = with_unselectable_events(&mask);
        assert!(
            told.contains(75) && told.contains(76) && told.contains(77),
            "begin and end of tasks are always in it"
        );
        assert_eq!(
            selected(&xpvm_mask()),
            XPVM_EVENTS.len(),
            "every name is one"
        );
    }
}
