//! The target of a pre-copy: receives pages and stores them until the restored task needs them.

use super::super::page_server_wire::{HeaderLayout, PRE_COPY_COUNT, PRE_COPY_PAGES, PageHeader};
use crate::engine::ReceivedPages;
use crate::engine::pages::BLOCK_PAGES;
use sempa_proto::migration::Failure;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Sends the number `page_count` to the source ([`PRE_COPY_COUNT`]).
fn send_page_count(stream: &mut UnixStream, page_count: u64) -> io::Result<()> {
    stream.write_all(&HeaderLayout::Long.encode(&PageHeader {
        command: PRE_COPY_COUNT,
        page_count,
        address: 0,
        namespace_pid: 0,
    }))
}

/// Confirms to the source that all pages that were pre-copied on this stream have arrived.
///
/// # Errors
/// The source does not read from the stream any more.
pub fn acknowledge(received_pages: &ReceivedPages, stream: &OwnedFd) -> io::Result<()> {
    send_page_count(
        &mut UnixStream::from(stream.try_clone()?),
        received_pages.page_count(),
    )
}

/// Sends the source the limit `bytes_max`, converted to pages. Then receives pre-copied pages on
/// this stream until the source reports the end.
///
/// # Errors
/// The stream ended early, the source violated the protocol or the limit, or memory is exhausted.
pub(in super::super) fn receive(
    stream: &OwnedFd,
    bytes_max: u64,
) -> Result<ReceivedPages, Failure> {
    let to_failure =
        |reason: String| Failure::Images(format!("pre-copied memory does not arrive: {reason}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(|e| to_failure(e.to_string()))?);
    let mut received_pages = ReceivedPages::empty();
    let mut content = vec![0; (BLOCK_PAGES * received_pages.page_size()) as usize];
    send_page_count(&mut stream, bytes_max / received_pages.page_size())
        .map_err(|e| to_failure(e.to_string()))?;
    loop {
        let mut header = [0; HeaderLayout::Long.bytes()];
        stream
            .read_exact(&mut header)
            .map_err(|e| to_failure(e.to_string()))?;
        let PageHeader {
            command,
            page_count: pages,
            address,
            namespace_pid: process,
        } = HeaderLayout::Long.decode(&header);
        match command {
            PRE_COPY_COUNT => return Ok(received_pages),
            PRE_COPY_PAGES => {
                let length = received_pages.bytes_within_block(address, pages);
                let length =
                    length.ok_or_else(|| to_failure(format!("{pages} pages at {address:#x}")))?;
                stream
                    .read_exact(&mut content[..length])
                    .map_err(|e| to_failure(e.to_string()))?;
                received_pages
                    .insert(process, address, &content[..length])
                    .map_err(|e| to_failure(e.to_string()))?;
            }
            other => {
                return Err(to_failure(format!(
                    "unknown command {other:#x} of the source"
                )));
            }
        }
        if received_pages.stored_bytes() > bytes_max {
            return Err(to_failure(format!(
                "the source has sent more than the permitted {bytes_max} bytes"
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pages::page_size;

    /// Sources that violate the protocol or exceed the limit are refused.
    #[test]
    fn malformed_pre_copies_are_refused() {
        let page_bytes = page_size();
        let send_commands = |commands: &[(u32, u64, u64)], bytes_max| {
            let (mut source_stream, target_stream) = UnixStream::pair().expect("descriptors");
            for (command, page_count, address) in commands {
                let header = PageHeader {
                    command: *command,
                    page_count: *page_count,
                    address: *address,
                    namespace_pid: 7,
                };
                source_stream
                    .write_all(&HeaderLayout::Long.encode(&header))
                    .expect("there is room");
                source_stream
                    .write_all(&vec![
                        5;
                        if *command == PRE_COPY_PAGES {
                            (page_count.min(&2) * page_bytes) as usize
                        } else {
                            0
                        }
                    ])
                    .expect("room");
            }
            source_stream
                .shutdown(std::net::Shutdown::Write)
                .expect("it is open");
            receive(&target_stream.into(), bytes_max)
                .map(|received_pages| received_pages.stored_bytes())
        };
        let valid_commands = [
            (PRE_COPY_PAGES, 2, 0),
            (PRE_COPY_PAGES, 1, page_bytes),
            (PRE_COPY_COUNT, 0, 0),
        ];
        assert_eq!(
            send_commands(&valid_commands, 2 * page_bytes),
            Ok(2 * page_bytes)
        );
        assert!(
            matches!(send_commands(&valid_commands, page_bytes), Err(Failure::Images(why)) if why.contains("more than the permitted"))
        );
        for invalid_commands in [
            &valid_commands[..2],
            &[(PRE_COPY_PAGES, 1, 5)],
            &[(PRE_COPY_PAGES, 1 << 60, 0)],
            &[(7, 1, 0)],
            &[],
        ] {
            assert!(
                matches!(
                    send_commands(invalid_commands, 9 * page_bytes),
                    Err(Failure::Images(_))
                ),
                "{invalid_commands:?}"
            );
        }
    }
}
