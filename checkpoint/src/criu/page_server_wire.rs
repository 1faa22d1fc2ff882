//! The wire format of CRIU's page server (`page-xfer.c`), with four additional commands for
//! pre-copy.
//!
//! A request is a header (`struct page_server_iov`). A reply is a header followed by the pages. All
//! numbers are in host byte order.

/// Command of a request: send the pages of a range. A command occupies the lower half of the
/// header's first field; the upper half contains the flags of the pages.
pub(super) const PS_IOV_GET: u32 = 7;
/// Command of a reply: the requested pages follow.
pub(super) const PS_IOV_ADD_F: u32 = 6;
/// Command of a pre-copy: the source sends pages. CRIU does not know this command
/// ([`super::pre_copy`]).
pub(super) const PRE_COPY_PAGES: u32 = 0x5e01;
/// Command of a pre-copy: a number of pages. It is sent three times: first the target sends how
/// many pages it accepts; at the end the source sends how many it has sent; then the target sends
/// how many it has received.
pub(super) const PRE_COPY_COUNT: u32 = 0x5e02;
/// Command after a pre-copy: requests those pages of a range whose content differs from the
/// pre-copied content.
pub(super) const GET_CHANGED: u32 = 0x5e03;
/// Reply to [`GET_CHANGED`]: a bitmap of the range (lowest bit of each byte first), followed by the
/// pages whose bit is set.
pub(super) const CHANGED_PAGES: u32 = 0x5e04;
/// Command: no more requests follow. The reply is [`CLOSE_REPLY`].
pub(super) const PS_IOV_CLOSE: u32 = 0x1023;
/// Like [`PS_IOV_CLOSE`]. CRIU sends this command on a socket that it has inherited, because its
/// caller may keep the socket open.
pub(super) const PS_IOV_FORCE_CLOSE: u32 = 0x1024;
/// Reply to the close commands: the status 0.
pub(super) const CLOSE_REPLY: [u8; 4] = [0; 4];
pub(super) const PS_CMD_BITS: u32 = 16;
pub(super) const PE_PRESENT: u32 = 1 << 2;

/// The layout of a header. The fields in order: command (4 bytes), number of pages, address (8
/// bytes), process (8 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderLayout {
    /// The number of pages has 4 bytes.
    Short,
    /// Since CRIU 4.2: the number of pages has 8 bytes, after 4 bytes of padding.
    Long,
}

impl HeaderLayout {
    pub(super) const BYTES_MAX: usize = HeaderLayout::Long.bytes();

    pub(super) const fn bytes(self) -> usize {
        match self {
            HeaderLayout::Short => 24,
            HeaderLayout::Long => 32,
        }
    }

    /// Detects the layout from the first request. The correct layout is the one in which the
    /// request is for a missing page. `is_missing` returns whether a page, given by process and
    /// address, is missing.
    pub(super) fn detect(
        received: &[u8],
        is_missing: impl Fn(u64, u64) -> bool,
    ) -> Option<HeaderLayout> {
        [HeaderLayout::Long, HeaderLayout::Short]
            .into_iter()
            .find(|layout| {
                let head = (received.len() >= layout.bytes()).then(|| layout.read(received));
                let asks = |head: PageHeader| {
                    matches!(head.command, PS_IOV_GET | GET_CHANGED)
                        && is_missing(head.process, head.address)
                };
                head.is_some_and(asks)
            })
    }

    pub(super) fn read(self, head: &[u8]) -> PageHeader {
        let short =
            |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let long =
            |at: usize| u64::from_ne_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let (pages, rest) = match self {
            HeaderLayout::Short => (short(4).into(), 8),
            HeaderLayout::Long => (long(8), 16),
        };
        PageHeader {
            command: short(0),
            pages,
            address: long(rest),
            process: long(rest + 8),
        }
    }

    pub(super) fn write(self, head: &PageHeader) -> Vec<u8> {
        let mut bytes = head.command.to_ne_bytes().to_vec();
        match self {
            HeaderLayout::Short => bytes.extend((head.pages as u32).to_ne_bytes()),
            HeaderLayout::Long => bytes.extend([&[0; 4][..], &head.pages.to_ne_bytes()].concat()),
        }
        bytes.extend(head.address.to_ne_bytes());
        bytes.extend(head.process.to_ne_bytes());
        bytes
    }
}

/// Returns the length in bytes of the bitmap of a [`CHANGED_PAGES`] reply.
pub(super) fn bitmap_bytes(pages: u64) -> usize {
    pages.div_ceil(8) as usize
}

/// Header of a request or reply: a range of pages of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHeader {
    pub(super) command: u32,
    pub(super) pages: u64,
    pub(super) address: u64,
    /// PID in the task's PID namespace.
    pub(super) process: u64,
}
