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
/// Command of a pre-copy with a number of pages. The command is sent three times. First the target
/// sends how many pages it accepts. At the end the source sends how many pages it has sent, and the
/// target replies how many pages it has received.
pub(super) const PRE_COPY_COUNT: u32 = 0x5e02;
/// Command after a pre-copy: requests those pages of a range whose content differs from the
/// pre-copied content.
pub(super) const GET_CHANGED: u32 = 0x5e03;
/// Reply to [`GET_CHANGED`]: a bitmap of the range (lowest bit of each byte first), followed by the
/// pages whose bit is set.
pub(super) const CHANGED_PAGES: u32 = 0x5e04;
/// Command: no more requests follow. The reply is [`CLOSE_REPLY`].
pub(super) const PS_IOV_CLOSE: u32 = 0x1023;
/// Command: no more requests follow, as with [`PS_IOV_CLOSE`]. CRIU sends this command on an
/// inherited socket, because CRIU's caller may keep the socket open.
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
    pub(super) const BYTES_MAX: usize = Self::Long.bytes();

    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Short => 24,
            Self::Long => 32,
        }
    }

    /// Detects the layout from the bytes of the first request. In the correct layout the request is
    /// for a missing page. `is_missing` returns whether the page of a process (first argument) at
    /// an address (second argument) is missing. `None` if no layout fits or the request is
    /// incomplete.
    pub(super) fn detect(
        request_bytes: &[u8],
        is_missing: impl Fn(u64, u64) -> bool,
    ) -> Option<Self> {
        [Self::Long, Self::Short].into_iter().find(|layout| {
            let header =
                (request_bytes.len() >= layout.bytes()).then(|| layout.decode(request_bytes));
            let requests_missing_page = |header: PageHeader| {
                matches!(header.command, PS_IOV_GET | GET_CHANGED)
                    && is_missing(header.namespace_pid, header.address)
            };
            header.is_some_and(requests_missing_page)
        })
    }

    pub(super) fn decode(self, bytes: &[u8]) -> PageHeader {
        let u32_at = |offset: usize| {
            u32::from_ne_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
        };
        let u64_at = |offset: usize| {
            u64::from_ne_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
        };
        let (page_count, address_offset) = match self {
            Self::Short => (u32_at(4).into(), 8),
            Self::Long => (u64_at(8), 16),
        };
        PageHeader {
            command: u32_at(0),
            page_count,
            address: u64_at(address_offset),
            namespace_pid: u64_at(address_offset + 8),
        }
    }

    pub(super) fn encode(self, header: &PageHeader) -> Vec<u8> {
        let mut bytes = header.command.to_ne_bytes().to_vec();
        match self {
            Self::Short => bytes.extend((header.page_count as u32).to_ne_bytes()),
            Self::Long => bytes.extend([&[0; 4][..], &header.page_count.to_ne_bytes()].concat()),
        }
        bytes.extend(header.address.to_ne_bytes());
        bytes.extend(header.namespace_pid.to_ne_bytes());
        bytes
    }
}

/// Returns the length in bytes of the bitmap of a [`CHANGED_PAGES`] reply.
pub(super) fn bitmap_bytes(page_count: u64) -> usize {
    page_count.div_ceil(8) as usize
}

/// Header of a request or reply: a range of pages of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHeader {
    pub(super) command: u32,
    pub(super) page_count: u64,
    pub(super) address: u64,
    /// PID in the task's PID namespace.
    pub(super) namespace_pid: u64,
}
