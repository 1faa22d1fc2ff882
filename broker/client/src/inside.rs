//! The connection of a member that is a task of the virtual machine. The daemon delivers frames in
//! order and reports the end of the broker, so this connection needs no thread and no heartbeat.

use crate::Error;
use crate::directory::{StartSettings, find_or_start, next_connection};
use crate::member::MemberState;
use crate::wire::{BROKER_CTX, decode_to_member, encode};
use libpvm::proto::message::ENC_XDR;
use libpvm::proto::task::{NotifyRequest, NotifySubjects};
use libpvm::proto::{Message, PvmError, Tid};
use libpvm::{Body, Vm};
use sempa_broker_session::{Backoff, Closing, Millis, Phase};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time for which a call tries to find or start a broker after the broker was lost.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Connection to the current broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    broker: Tid,
    /// Tag of all messages of this connection.
    tag: i32,
}

impl Connection {
    fn selects(self, message: &Message) -> bool {
        message.ctx == BROKER_CTX && message.tag == self.tag
    }
}

#[derive(Debug)]
pub(crate) struct InsideLink {
    vm: Vm,
    session: String,
    broker_options: Vec<String>,
    started_at: Instant,
    /// Changes when a thread has handled frames for which others may wait.
    generation: AtomicU64,
}

impl InsideLink {
    pub(crate) fn new(vm: Vm, session: &str, broker_options: &[String]) -> Self {
        Self {
            vm,
            session: session.to_string(),
            broker_options: broker_options.to_vec(),
            started_at: Instant::now(),
            generation: AtomicU64::new(0),
        }
    }

    pub(crate) fn vm(&self) -> &Vm {
        &self.vm
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn now(&self) -> Millis {
        Millis(u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Handles what has arrived, connects again if the broker was lost, and sends what is queued.
    pub(crate) fn pump(&self, state: &mut MemberState) -> Result<(), Error> {
        self.pump_until(state, None)
    }

    pub(crate) fn pump_until(
        &self,
        state: &mut MemberState,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let mut backoff = Backoff::default();
        loop {
            let is_connected = self.take_frames(state)?;
            if matches!(state.endpoint.phase(), Phase::Closed(_)) {
                return Ok(());
            }
            if is_connected {
                return self.flush(state);
            }
            let deadline = deadline.unwrap_or_else(|| Instant::now() + RECONNECT_TIMEOUT);
            if let Some(refusal) = state.endpoint.take_temporary_refusal() {
                state.refusal = Some(refusal);
                if Instant::now() >= deadline {
                    let session = self.session.clone();
                    return Err(Error::Refused { session, refusal });
                }
                let pause = backoff.next_delay(self.vm.tid().raw().unsigned_abs());
                self.pause(Duration::from_millis(pause.0))?;
            }
            self.connect(state, deadline)?;
        }
    }

    /// Handles the frames that have arrived. Returns false if there is no connection.
    fn take_frames(&self, state: &mut MemberState) -> Result<bool, Error> {
        let Some(connection) = state.connection else {
            return Ok(false);
        };
        let mut has_handled = false;
        let mut is_lost = false;
        loop {
            let message = self
                .vm
                .runtime()
                .check_inbox(&mut |inbox| inbox.take_first(|message| connection.selects(message)));
            let Some(message) = message else { break };
            has_handled = true;
            // A message from the daemon reports the end of the broker; an empty one from the broker
            // closes the connection.
            match decode_to_member(&message.body).filter(|_| message.src == connection.broker) {
                Some(frame) => state.endpoint.handle(self.now(), frame),
                None => is_lost = true,
            }
        }
        if !has_handled && !self.vm.runtime().is_connected() {
            let reason = self.vm.runtime().lost_reason();
            return Err(libpvm::Error::new(PvmError::SysErr, reason).into());
        }
        if has_handled {
            self.generation.fetch_add(1, Ordering::AcqRel);
            self.vm.runtime().wake_waiting_threads();
        }
        if is_lost || state.endpoint.phase() == Phase::Disconnected {
            state.endpoint.disconnected();
            state.connection = None;
            return Ok(false);
        }
        Ok(true)
    }

    fn connect(&self, state: &mut MemberState, deadline: Instant) -> Result<(), Error> {
        let settings = StartSettings {
            options: &self.broker_options,
            host: None,
        };
        let broker = match find_or_start(&self.vm, &self.session, settings, deadline) {
            Ok(broker) => broker,
            Err(error) => {
                if let Error::Over { end, .. } = &error {
                    state.endpoint.close(Closing::Over(*end));
                }
                return Err(error);
            }
        };
        let connection = Connection {
            broker,
            tag: next_connection(),
        };
        self.vm.notify(NotifyRequest {
            subjects: NotifySubjects::TaskExit(vec![broker]),
            ctx: BROKER_CTX,
            tag: connection.tag,
            is_cancellation: false,
        })?;
        state.connection = Some(connection);
        state.endpoint.connected(self.now());
        self.flush(state)?;
        self.wait(connection, self.generation(), Some(deadline))
    }

    /// Sends all queued frames.
    pub(crate) fn flush(&self, state: &mut MemberState) -> Result<(), Error> {
        let Some(connection) = state.connection else {
            return Ok(());
        };
        while let Some(frame) = state.endpoint.poll(self.now()) {
            let body = Body {
                enc: ENC_XDR,
                bytes: encode(&frame).into(),
            };
            self.vm
                .send_in_context(connection.broker, BROKER_CTX, connection.tag, body)?;
        }
        Ok(())
    }

    /// Waits until a frame has arrived on the connection, or another thread has handled frames.
    pub(crate) fn wait(
        &self,
        connection: Connection,
        generation: u64,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        self.vm
            .runtime()
            .wait_for_inbox(deadline, &mut |inbox| {
                let has_frame = inbox.iter().any(|message| connection.selects(message));
                (has_frame || self.generation() != generation).then_some(())
            })
            .map_err(|error| libpvm::Error::new(error, self.vm.runtime().lost_reason()))?;
        Ok(())
    }

    fn pause(&self, time: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + time;
        self.vm
            .runtime()
            .wait_for_inbox::<()>(Some(deadline), &mut |_| None)
            .map_err(|error| libpvm::Error::new(error, self.vm.runtime().lost_reason()))?;
        Ok(())
    }
}
