//! Reads the policy file at the start and watches it for changes. A separate thread sends the new
//! content to the service as a message, because the service waits only for messages.

use crate::api::{RealVm, VmApi};
use crate::policy::POLICY_BYTES_MAX;
use crate::service::TAG_POLICY;
use bytes::Bytes;
use libpvm::Vm;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use sempa_proto::Message;
use sempa_proto::event::EventKind;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::rm::CTX_RM;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Reads at most one byte more than the maximum size. From this byte the parser detects a file that
/// is too large.
fn read_limited(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(POLICY_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the content of the policy file, at most one byte more than [`POLICY_BYTES_MAX`].
///
/// # Errors
///
/// A text that states why the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    read_limited(path).map_err(|error| error.to_string())
}

/// Starts a thread that sends the content of the file to this process's own task whenever the file
/// is written or replaced. `content_at_start`: the content read at the start.
///
/// # Errors
/// The file's directory cannot be watched.
pub fn watch(
    path: &Path,
    content_at_start: Result<Vec<u8>, String>,
    vm: &Vm,
) -> std::io::Result<()> {
    let (vm, path) = (vm.clone(), std::path::absolute(path)?);
    let watched_dir = path
        .parent()
        .map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC)?;
    // The watch is on the directory instead of the file, because editors replace the file.
    inotify.add_watch(
        &watched_dir,
        AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO,
    )?;
    std::thread::spawn(move || {
        // The file may have changed between the first read and the start of the watch. Unchanged
        // content is not sent again.
        if read(&path) != content_at_start {
            send_content(&path, &vm);
        }
        drop(content_at_start);
        while let Ok(events) = inotify.read_events() {
            if events
                .iter()
                .any(|event| event.name.as_deref() == path.file_name())
            {
                send_content(&path, &vm);
            }
        }
    });
    Ok(())
}

/// Sends the content to this process's own task. If the file is missing or cannot be read, nothing
/// is sent. A file that cannot be read is recorded in the event log.
fn send_content(path: &Path, vm: &Vm) {
    let body = match read_limited(path) {
        Ok(bytes) => Bytes::from(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => return,
        Err(error) => {
            let text = format!(
                "{} cannot be read: {error}; the policy is unchanged",
                path.display()
            );
            let vm = RealVm::new(vm.clone());
            drop(vm.record_event(vm.wall_clock(), EventKind::Note { text }));
            return;
        }
    };
    let own_tid = vm.tid();
    let message = Message {
        src: own_tid,
        dst: own_tid,
        ctx: CTX_RM,
        tag: TAG_POLICY,
        wid: 0,
        enc: DSIG_X86_64,
        body,
    };
    // The send fails if the daemon is gone. The service then ends, and this thread ends with it.
    drop(vm.send_message(message));
}
