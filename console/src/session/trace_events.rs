//! The events that traced tasks record, as a mask. Pure.

use libpvm::trace_events::{EVENT_NAMES, EventMask};

/// Events that are not caused by a call. These events are always recorded and cannot be selected.
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
    let numbers_and_names = EVENT_NAMES
        .iter()
        .enumerate()
        .map(|(event, name)| (event, name.to_str().expect("names are ASCII")));
    numbers_and_names.filter(|(_, name)| !UNSELECTABLE_EVENTS.contains(name))
}

/// Returns the mask for a traced task: the selected events and the events that are always recorded.
pub(crate) fn with_unselectable_events(mask: &EventMask) -> EventMask {
    let mut task_mask = *mask;
    UNSELECTABLE_EVENTS
        .into_iter()
        .filter_map(EventMask::event_number)
        .for_each(|event| task_mask.set(event, true));
    task_mask
}

/// Returns the event mask of a new console: the events of [`XPVM_EVENTS`].
pub(crate) fn xpvm_mask() -> EventMask {
    let mut mask = EventMask::empty();
    XPVM_EVENTS
        .into_iter()
        .filter_map(EventMask::event_number)
        .for_each(|event| mask.set(event, true));
    mask
}

/// Selects (`is_selected` is true) or deselects the event `name`, or all events if `name` is `*`.
/// Returns false if no event has this name.
pub(crate) fn select_events(mask: &mut EventMask, is_selected: bool, name: &str) -> bool {
    let mut found = false;
    for (event, _) in selectable_events().filter(|(_, event)| name == "*" || *event == name) {
        mask.set(event, is_selected);
        found = true;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_selected_by_name_or_all() {
        let mut mask = EventMask::empty();
        let selected_count = |mask: &EventMask| {
            selectable_events()
                .filter(|(event, _)| mask.contains(*event))
                .count()
        };
        assert!(
            select_events(&mut mask, true, "send")
                && mask.contains(EventMask::event_number("send").expect("an event"))
        );
        assert!(!select_events(&mut mask, true, "x") && !select_events(&mut mask, true, "newtask"));
        assert!(select_events(&mut mask, true, "*"));
        assert_eq!(selected_count(&mask), 104);
        select_events(&mut mask, false, "*");
        assert_eq!(mask, EventMask::empty());
        let task_mask = with_unselectable_events(&mask);
        assert!(
            task_mask.contains(75) && task_mask.contains(76) && task_mask.contains(77),
            "begin and end of tasks are always in it"
        );
        assert_eq!(
            selected_count(&xpvm_mask()),
            XPVM_EVENTS.len(),
            "every name is one"
        );
    }
}
