//! The wire format of CRIU's page server (`page-xfer.c`), with four commands of our own for
//! pre-copy.
//!
//! A request is a header (`struct page_server_iov`). A reply is a header followed by the pages. All
//! numbers are in host byte order.

/// The commands PS_IOV_GET and PS_IOV_ADD_F. They occupy the lower half of the header's first
/// field; the upper half has the flags of the pages.
pub(super) const GET: u32 = 7;
pub(super) const ADD: u32 = 6;
/// Commands of a pre-copy, unknown to CRIU ([`super::precopy`]). [`AHEAD`] is followed by pages.
/// [`ALL_AHEAD`] has a page count: first from the target, the number of pages that it accepts; then
/// from the source, the number that it has sent, as the end of the pre-copy; last from the target,
/// the number that it has received.
pub(super) const AHEAD: u32 = 0x5e01;
pub(super) const ALL_AHEAD: u32 = 0x5e02;
/// Commands after a pre-copy. [`GET_CHANGED`] requests those pages of a range whose content differs
/// from what was pre-copied. The reply [`CHANGED`] has a bitmap of the range (lowest bit of each
/// byte first), followed by the pages whose bit is set.
pub(super) const GET_CHANGED: u32 = 0x5e03;
pub(super) const CHANGED: u32 = 0x5e04;
/// PS_IOV_CLOSE and PS_IOV_FORCE_CLOSE: no more requests follow. The reply is a status of four
/// bytes. CRIU sends the second on a socket that it has inherited, because its caller may hold that
/// socket open.
pub(super) const CLOSE: u32 = 0x1023;
pub(super) const CLOSE_ALL_THE_SAME: u32 = 0x1024;
pub(super) const PARTING: [u8; 4] = [0; 4];
pub(super) const FLAGS_SHIFT: u32 = 16;
pub(super) const PRESENT: u32 = 1 << 2;

/// The layout of a header. Fields: command (4 bytes), number of pages, address (8 bytes), process
/// (8 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The number of pages has 4 bytes.
    Short,
    /// Since CRIU 4.2: the number of pages has 8 bytes, after 4 bytes of padding.
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

    /// Detects the layout from a first request. The right layout is the one in which the request is
    /// for a missing page; `misses` tells that for a process and an address.
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

/// Returns the length of the bitmap of a [`CHANGED`] reply.
pub(super) fn marks_bytes(pages: u64) -> usize {
    pages.div_ceil(8) as usize
}

/// Header of a request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) command: u32,
    pub(super) pages: u64,
    pub(super) address: u64,
    /// PID in the task's PID namespace.
    pub(super) process: u64,
}
