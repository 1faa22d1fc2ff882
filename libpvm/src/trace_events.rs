//! PVM's trace events: their names, and the mask that selects events.

use std::ffi::CStr;

/// Event names. The position of a name is the number that PVM gives to the event.
pub const EVENT_NAMES: [&CStr; 109] = [
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

/// Number of characters in a mask, without the terminating NUL.
pub const MASK_LEN_CHARS: usize = 35;

/// Set of the events that a task records, in the format of `PVMTMASK`: each character contains four
/// events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventMask([u8; MASK_LEN_CHARS]);

/// Character that contains no events. The four low bits of a character stand for its four events.
const NO_EVENTS: u8 = b'@';
/// Number of events in one character of a mask.
const EVENTS_PER_CHAR: usize = 4;

impl EventMask {
    pub const fn empty() -> Self {
        Self([NO_EVENTS; MASK_LEN_CHARS])
    }

    /// Returns the set of all named events.
    pub fn with_all_events() -> Self {
        let mut mask = Self::empty();
        (0..EVENT_NAMES.len()).for_each(|event| mask.set(event, true));
        mask
    }

    /// Parses a mask, which ends at the first NUL or at the end of `bytes`. Events beyond the end
    /// of the mask are not selected.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut mask = Self::empty();
        for (mask_char, mask_byte) in mask
            .0
            .iter_mut()
            .zip(bytes.iter().take_while(|byte| **byte != 0))
        {
            *mask_char = NO_EVENTS | mask_byte & 0xf;
        }
        mask
    }

    /// Returns the mask in the format of `PVMTMASK`.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the number of the event with this name.
    pub fn event_number(name: &str) -> Option<usize> {
        EVENT_NAMES
            .iter()
            .position(|event| event.to_bytes() == name.as_bytes())
    }

    /// Selects or deselects the event with this number.
    pub fn set(&mut self, event: usize, selected: bool) {
        let bit = 1 << (event % EVENTS_PER_CHAR);
        let mask_char = &mut self.0[event / EVENTS_PER_CHAR];
        *mask_char = if selected {
            *mask_char | bit
        } else {
            *mask_char & !bit
        };
    }

    /// True if the event with this number is selected.
    pub fn contains(&self, event: usize) -> bool {
        self.0
            .get(event / EVENTS_PER_CHAR)
            .is_some_and(|char| char & 1 << (event % EVENTS_PER_CHAR) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mask packs four events into each character and is parsed back unchanged.
    #[test]
    fn mask_packs_four_events_per_character() {
        let mut mask = EventMask::empty();
        assert_eq!(mask.as_bytes(), [b'@'; MASK_LEN_CHARS]);
        mask.set(0, true);
        mask.set(5, true);
        assert!(mask.as_bytes().starts_with(b"AB@@"));
        assert!(mask.contains(0) && mask.contains(5) && !mask.contains(4));
        mask.set(0, false);
        assert!(mask.as_bytes().starts_with(b"@B@@"));
        assert_eq!(EventMask::from_bytes(mask.as_bytes()), mask);
        assert_eq!(EventMask::from_bytes(b""), EventMask::empty());
        assert!((0..EVENT_NAMES.len()).all(|event| EventMask::with_all_events().contains(event)));
        assert!(
            !EventMask::with_all_events().contains(EVENT_NAMES.len()) && !mask.contains(usize::MAX)
        );
    }

    #[test]
    fn event_numbers_match_pvm() {
        assert_eq!(EventMask::event_number("addhosts"), Some(0));
        assert_eq!(EventMask::event_number("newtask"), Some(75));
        assert_eq!(EventMask::event_number("user_defined"), Some(108));
        assert_eq!(EventMask::event_number("x"), None);
    }
}
