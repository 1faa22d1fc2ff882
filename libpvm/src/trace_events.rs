//! Names of PVM's trace events, in the order that gives them their numbers, and the mask that chooses among them.

use std::ffi::CStr;

/// Names of the events; the number of an event is its position.
pub const EVENTS: [&CStr; 109] = [
    c"addhosts",
    c"barrier",
    c"bcast",
    c"bufinfo",
    c"config",
    c"delete",
    c"delhosts",
    c"exit",
    c"freebuf",
    c"getfds",
    c"getinst",
    c"getopt",
    c"getrbuf",
    c"getsbuf",
    c"gettid",
    c"gsize",
    c"halt",
    c"initsend",
    c"insert",
    c"joingroup",
    c"kill",
    c"lookup",
    c"lvgroup",
    c"mcast",
    c"mkbuf",
    c"mstat",
    c"mytid",
    c"notify",
    c"nrecv",
    c"parent",
    c"perror",
    c"pkbyte",
    c"pkcplx",
    c"pkdcplx",
    c"pkdouble",
    c"pkfloat",
    c"pkint",
    c"pkuint",
    c"pklong",
    c"pkulong",
    c"pkshort",
    c"pkushort",
    c"pkstr",
    c"probe",
    c"pstat",
    c"recv",
    c"recvf",
    c"send",
    c"sendsig",
    c"setopt",
    c"setrbuf",
    c"setsbuf",
    c"spawn",
    c"start_pvmd",
    c"tasks",
    c"tickle",
    c"tidtohost",
    c"trecv",
    c"upkbyte",
    c"upkcplx",
    c"upkdcplx",
    c"upkdouble",
    c"upkfloat",
    c"upkint",
    c"upkuint",
    c"upklong",
    c"upkulong",
    c"upkshort",
    c"upkushort",
    c"upkstr",
    c"version",
    c"reg_hoster",
    c"reg_rm",
    c"reg_tasker",
    c"reg_tracer",
    c"newtask",
    c"endtask",
    c"spntask",
    c"archcode",
    c"catchout",
    c"getmwid",
    c"gettmask",
    c"hostsync",
    c"packf",
    c"precv",
    c"psend",
    c"reduce",
    c"setmwid",
    c"settmask",
    c"unpackf",
    c"gather",
    c"scatter",
    c"putinfo",
    c"getinfo",
    c"delinfo",
    c"getmboxinfo",
    c"newcontext",
    c"freecontext",
    c"setcontext",
    c"getcontext",
    c"siblings",
    c"getminfo",
    c"setminfo",
    c"addmhf",
    c"delmhf",
    c"mhf_invoke",
    c"timing",
    c"profiling",
    c"user_defined",
];

/// Characters of a mask, without the NUL at its end.
pub const MASK_LEN: usize = 35;

/// Which events a task is to record, as it travels in `PVMTMASK`: four events in each character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventMask([u8; MASK_LEN]);

/// A character without events; the four events are its low bits.
const NO_EVENTS: u8 = b'@';
/// Events in a character.
const EVENTS_IN_CHAR: usize = 4;

impl EventMask {
    /// No event.
    pub const fn none() -> EventMask {
        EventMask([NO_EVENTS; MASK_LEN])
    }

    /// All events that have names.
    pub fn all() -> EventMask {
        let mut mask = EventMask::none();
        (0..EVENTS.len()).for_each(|event| mask.set(event, true));
        mask
    }

    /// Reads a mask; what is missing at its end means no event.
    pub fn from_bytes(bytes: &[u8]) -> EventMask {
        let mut mask = EventMask::none();
        for (to, from) in mask
            .0
            .iter_mut()
            .zip(bytes.iter().take_while(|byte| **byte != 0))
        {
            *to = NO_EVENTS | from & 0xf;
        }
        mask
    }

    /// The mask as it travels.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The number of the event with this name.
    pub fn event(name: &str) -> Option<usize> {
        EVENTS
            .iter()
            .position(|event| event.to_bytes() == name.as_bytes())
    }

    /// Chooses an event, or not. `event` is its number.
    pub fn set(&mut self, event: usize, on: bool) {
        let bit = 1 << (event % EVENTS_IN_CHAR);
        let char = &mut self.0[event / EVENTS_IN_CHAR];
        *char = if on { *char | bit } else { *char & !bit };
    }

    /// True when an event is chosen. `event` is its number.
    pub fn has(&self, event: usize) -> bool {
        self.0
            .get(event / EVENTS_IN_CHAR)
            .is_some_and(|char| char & 1 << (event % EVENTS_IN_CHAR) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_four_events_in_a_character() {
        let mut mask = EventMask::none();
        assert_eq!(mask.as_bytes(), [b'@'; MASK_LEN]);
        mask.set(0, true);
        mask.set(5, true);
        assert!(mask.as_bytes().starts_with(b"AB@@"));
        assert!(mask.has(0) && mask.has(5) && !mask.has(4));
        mask.set(0, false);
        assert!(mask.as_bytes().starts_with(b"@B@@"));
        assert_eq!(EventMask::from_bytes(mask.as_bytes()), mask);
        assert_eq!(EventMask::from_bytes(b""), EventMask::none());
        assert!((0..EVENTS.len()).all(|event| EventMask::all().has(event)));
        assert!(!EventMask::all().has(EVENTS.len()) && !mask.has(usize::MAX));
    }

    #[test]
    fn events_are_known_by_the_numbers_that_pvm_gives_them() {
        assert_eq!(EventMask::event("addhosts"), Some(0));
        assert_eq!(EventMask::event("newtask"), Some(75));
        assert_eq!(EventMask::event("user_defined"), Some(108));
        assert_eq!(EventMask::event("x"), None);
    }
}
