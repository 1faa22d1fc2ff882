//! The words in which CRIU asks for memory and hands it out (those of its page server): a head, and behind that of an answer the pages.

/// Commands, in the lower half of a head's first number. In its upper half are the flags of the pages.
pub(super) const GET: u32 = 7;
pub(super) const ADD: u32 = 6;
/// Ours, and not known to CRIU. While a task runs: pages, which go ahead ([`super::precopy`]); and how many: before all else the target
/// says how many it takes, the source how many it has sent when no more come, and the target that it has them.
pub(super) const AHEAD: u32 = 0x5e01;
pub(super) const ALL_AHEAD: u32 = 0x5e02;
/// Later: those of these pages are wanted that are not any more what went ahead. In front of the pages of the answer is a bit for
/// each of the question, the lowest of a byte first: it comes.
pub(super) const GET_CHANGED: u32 = 0x5e03;
pub(super) const CHANGED: u32 = 0x5e04;
/// Nothing more will be asked; a number of four bytes is the answer. The second is for a stream that others hold open.
pub(super) const CLOSE: u32 = 0x1023;
pub(super) const CLOSE_ALL_THE_SAME: u32 = 0x1024;
pub(super) const PARTING: [u8; 4] = [0; 4];
pub(super) const FLAGS_SHIFT: u32 = 16;
pub(super) const PRESENT: u32 = 1 << 2;

/// How a head is laid out: four bytes of command; pages; the address, and the process by its number, of eight bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Pages are counted in four bytes.
    Short,
    /// In eight, behind four without a meaning; since CRIU 4.2.
    Long,
}

impl Form {
    pub(super) const BYTES_MAX: usize = Form::Long.bytes();

    pub(super) const fn bytes(self) -> usize {
        match self {
            Form::Short => 24,
            Form::Long => 32,
        }
    }

    /// The form of a first question, which asks for something that is missing: `misses` knows, of a process, what.
    pub(super) fn of_question(heard: &[u8], misses: impl Fn(u64, u64) -> bool) -> Option<Form> {
        [Form::Long, Form::Short].into_iter().find(|form| {
            let head = (heard.len() >= form.bytes()).then(|| form.read(heard));
            let asks = |head: Head| {
                matches!(head.command, GET | GET_CHANGED) && misses(head.process, head.address)
            };
            head.is_some_and(asks)
        })
    }

    pub(super) fn read(self, head: &[u8]) -> Head {
        let short =
            |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let long =
            |at: usize| u64::from_ne_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let (pages, rest) = match self {
            Form::Short => (short(4).into(), 8),
            Form::Long => (long(8), 16),
        };
        Head {
            command: short(0),
            pages,
            address: long(rest),
            process: long(rest + 8),
        }
    }

    pub(super) fn write(self, head: &Head) -> Vec<u8> {
        let mut bytes = head.command.to_ne_bytes().to_vec();
        match self {
            Form::Short => bytes.extend((head.pages as u32).to_ne_bytes()),
            Form::Long => bytes.extend([&[0; 4][..], &head.pages.to_ne_bytes()].concat()),
        }
        bytes.extend(head.address.to_ne_bytes());
        bytes.extend(head.process.to_ne_bytes());
        bytes
    }
}

/// Bytes of the bits in front of changed pages.
pub(super) fn marks_bytes(pages: u64) -> usize {
    pages.div_ceil(8) as usize
}

/// Of a question, or of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) command: u32,
    pub(super) pages: u64,
    pub(super) address: u64,
    pub(super) process: u64,
}
