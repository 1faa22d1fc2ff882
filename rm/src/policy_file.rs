//! The policy file on disk: read at the start, and followed. What it contains goes to the service as a message, because the
//! service waits for messages only.

use crate::policy::POLICY_BYTES_MAX;
use crate::service::TAG_POLICY;
use bytes::Bytes;
use inotify::{Inotify, WatchMask};
use libpvm::Vm;
use sempa_proto::Message;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::rm::CTX_RM;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What it contains; of a longer one as much as shows that it is too long.
///
/// # Errors
/// It cannot be read.
pub fn content(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(POLICY_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

/// Sends the content to the own task whenever the file was written or replaced.
///
/// # Errors
/// Its folder cannot be followed.
pub fn follow(path: &Path, vm: &Vm) -> std::io::Result<()> {
    let (vm, path) = (vm.clone(), std::path::absolute(path)?);
    let folder = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
    let mut inotify = Inotify::init()?;
    // The folder and not the file: editors replace it.
    inotify.watches().add(folder, WatchMask::CLOSE_WRITE | WatchMask::MOVED_TO)?;
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            let Ok(events) = inotify.read_events_blocking(&mut buffer) else { return };
            if !events.into_iter().any(|event| event.name == path.file_name()) {
                continue;
            }
            // One that was removed or cannot be read for the moment changes nothing.
            let Ok(text) = content(&path) else { continue };
            let (src, body) = (vm.tid(), Bytes::from(text));
            let message = Message { src, dst: src, ctx: CTX_RM, tag: TAG_POLICY, wid: 0, enc: DSIG_X86_64, body };
            if vm.send_message(message).is_err() {
                return;
            }
        }
    });
    Ok(())
}
