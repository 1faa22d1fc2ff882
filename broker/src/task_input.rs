//! Frames of members within the virtual machine, and notices about their ends.

use crate::serve::Input;
use libpvm::proto::message::ENC_XDR;
use libpvm::proto::task::{NotifyRequest, NotifySubjects};
use libpvm::proto::{Message, Tid};
use libpvm::{Body, Vm};
use sempa_broker_client::wire::{BROKER_CTX, decode_to_broker, encode};
use sempa_broker_session::ToMember;
use std::sync::mpsc::SyncSender;

/// Tag of notices about tasks; members use tags from 1 on.
const NOTICE_TAG: i32 = 0;

/// Reads messages until the virtual machine ends, and passes them on.
pub(crate) fn read_tasks(vm: &Vm, inputs: &SyncSender<Input>) {
    let is_for_broker = |message: &Message| message.ctx == BROKER_CTX;
    while let Ok(message) = vm.recv_where(is_for_broker) {
        let Some(input) = to_input(&message) else {
            continue;
        };
        if inputs.send(input).is_err() {
            return;
        }
    }
    // The broker may have ended already.
    let _ = inputs.send(Input::VmLost);
}

fn to_input(message: &Message) -> Option<Input> {
    if message.tag == NOTICE_TAG {
        let tid = Vm::unpack(message).ok()?.read_int().ok()?;
        return Some(Input::TaskEnded(Tid::from_raw(tid)));
    }
    let frame = decode_to_broker(&message.body)?;
    let (tid, tag) = (message.src, message.tag);
    message
        .src
        .is_task()
        .then_some(Input::TaskFrame { tid, tag, frame })
}

/// Requests a notice when a task ends.
pub(crate) fn watch_task(vm: &Vm, tid: i32) -> Result<(), libpvm::Error> {
    vm.notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(vec![Tid::from_raw(tid)]),
        ctx: BROKER_CTX,
        tag: NOTICE_TAG,
        is_cancellation: false,
    })
}

/// Sends a frame to a member.
pub(crate) fn send_frame(
    vm: &Vm,
    tid: Tid,
    tag: i32,
    frame: &ToMember,
) -> Result<(), libpvm::Error> {
    send_bytes(vm, tid, tag, encode(frame))
}

/// Sends a message of a broker.
pub(crate) fn send_bytes(vm: &Vm, tid: Tid, tag: i32, bytes: Vec<u8>) -> Result<(), libpvm::Error> {
    let body = Body {
        enc: ENC_XDR,
        bytes: bytes.into(),
    };
    vm.send_in_context(tid, BROKER_CTX, tag, body)
}
