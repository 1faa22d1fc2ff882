//! Message handlers: functions of the program that process messages on arrival, before a receive
//! call can return these messages (`pvm_addmhf`).
//!
//! Handler numbers start with the library's own handlers (`control::LIBRARY_HANDLED_TAGS`), so the
//! program's first handler has the number 9.

use crate::control;
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::{PvmError, PvmResult};

/// A message handler. Its argument is the number of the message's buffer.
pub(crate) type HandlerFn = extern "C" fn(i32) -> i32;

/// Maximum number of a program's handlers, including the free slots of removed handlers.
pub(crate) const HANDLER_COUNT_MAX: usize = 65536;

/// Selects the messages that a handler processes; −1 in a field matches any value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) src: i32,
    pub(crate) tag: i32,
    pub(crate) ctx: i32,
}

impl Filter {
    fn fields(&self) -> [i32; 3] {
        [self.src, self.tag, self.ctx]
    }

    fn matches(&self, message: &Self) -> bool {
        self.fields()
            .iter()
            .zip(message.fields())
            .all(|(filter_value, message_value)| {
                *filter_value == -1 || *filter_value == message_value
            })
    }

    /// True if a message exists that both filters match: in every field the values are equal or one
    /// of them is −1.
    fn overlaps(&self, other: &Self) -> bool {
        self.fields()
            .iter()
            .zip(other.fields())
            .all(|(a, b)| *a == b || *a == -1 || b == -1)
    }
}

/// The handlers of the program. Their numbers follow the numbers of the library's own handlers.
#[derive(Default)]
pub(crate) struct Handlers {
    user_handlers: Vec<Option<(Filter, HandlerFn)>>,
}

impl Handlers {
    fn library_filters() -> impl Iterator<Item = Filter> {
        control::LIBRARY_HANDLED_TAGS.into_iter().map(|tag| Filter {
            src: -1,
            tag,
            ctx: CTX_TASK_CONTROL,
        })
    }

    /// Adds a handler and returns its number.
    ///
    /// # Errors
    /// `Exists` if the filter overlaps the filter of another handler, `NoMem` at
    /// [`HANDLER_COUNT_MAX`].
    pub(crate) fn add(&mut self, filter: Filter, handler: HandlerFn) -> PvmResult<i32> {
        let user_filters = self
            .user_handlers
            .iter()
            .flatten()
            .map(|(filter, _)| *filter);
        if Self::library_filters()
            .chain(user_filters)
            .any(|other| other.overlaps(&filter))
        {
            return Err(PvmError::Exists);
        }
        // The number of a removed handler is reused, as in PVM.
        let slot = self.first_free_slot().unwrap_or(self.user_handlers.len());
        if slot >= HANDLER_COUNT_MAX {
            return Err(PvmError::NoMem);
        }
        self.user_handlers
            .resize(self.user_handlers.len().max(slot + 1), None);
        self.user_handlers[slot] = Some((filter, handler));
        Ok((control::LIBRARY_HANDLED_TAGS.len() + slot) as i32)
    }

    /// Removes a handler of the program.
    ///
    /// # Errors
    /// `BadParam` for a negative number, `NotFound` if the program has no handler with this number.
    pub(crate) fn remove(&mut self, id: i32) -> PvmResult<()> {
        let id = usize::try_from(id).map_err(|_| PvmError::BadParam)?;
        let slot = id
            .checked_sub(control::LIBRARY_HANDLED_TAGS.len())
            .and_then(|i| self.user_handlers.get_mut(i));
        slot.and_then(Option::take)
            .map(drop)
            .ok_or(PvmError::NotFound)
    }

    /// Returns the handler for a message with these header fields.
    pub(crate) fn find(&self, message: &Filter) -> Option<HandlerFn> {
        self.user_handlers
            .iter()
            .flatten()
            .find(|(filter, _)| filter.matches(message))
            .map(|(_, handler)| *handler)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.user_handlers.iter().all(Option::is_none)
    }

    pub(crate) fn clear(&mut self) {
        self.user_handlers.clear();
    }

    /// Returns the number and the filter of every handler, the library's own handlers first.
    pub(crate) fn numbered_filters(&self) -> Vec<(i32, Filter)> {
        let user_filters = self
            .user_handlers
            .iter()
            .map(|entry| entry.as_ref().map(|(filter, _)| *filter));
        let all_filters = Self::library_filters()
            .map(Some)
            .chain(user_filters)
            .enumerate();
        all_filters
            .filter_map(|(id, filter)| filter.map(|filter| (id as i32, filter)))
            .collect()
    }

    fn first_free_slot(&self) -> Option<usize> {
        self.user_handlers.iter().position(Option::is_none)
    }

    /// Returns the lowest handler number that is free because its handler was removed; `None` if
    /// there is no such number.
    pub(crate) fn lowest_free_id(&self) -> Option<i32> {
        self.first_free_slot()
            .map(|free_slot| (control::LIBRARY_HANDLED_TAGS.len() + free_slot) as i32)
    }

    /// Returns how many handler numbers are in the table, including the numbers of removed
    /// handlers.
    pub(crate) fn id_count(&self) -> usize {
        control::LIBRARY_HANDLED_TAGS.len() + self.user_handlers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn ignore_message(_mid: i32) -> i32 {
        0
    }

    /// The program's first handler has the number 9, and each handler processes only the messages
    /// that match its filter.
    #[test]
    fn first_user_handler_has_number_nine() {
        let mut handlers = Handlers::default();
        let filter = Filter {
            src: -1,
            tag: 5,
            ctx: 0,
        };
        assert_eq!(handlers.add(filter, ignore_message), Ok(9));
        assert_eq!(
            handlers.add(Filter { tag: 6, ..filter }, ignore_message),
            Ok(10)
        );
        assert!(
            handlers
                .find(&Filter {
                    src: 0x40001,
                    tag: 5,
                    ctx: 0
                })
                .is_some()
        );
        assert!(
            handlers
                .find(&Filter {
                    src: 0x40001,
                    tag: 7,
                    ctx: 0
                })
                .is_none()
        );
    }

    /// A handler is refused if its filter is equal to, wider or narrower than another filter; only
    /// a program's own handlers can be removed.
    #[test]
    fn overlapping_handlers_are_refused() {
        let mut handlers = Handlers::default();
        let narrow_filter = Filter {
            src: 0x40001,
            tag: 5,
            ctx: 0,
        };
        assert_eq!(handlers.add(narrow_filter, ignore_message), Ok(9));
        assert_eq!(
            handlers.add(
                Filter {
                    src: -1,
                    ..narrow_filter
                },
                ignore_message
            ),
            Err(PvmError::Exists)
        );
        assert_eq!(
            handlers.add(narrow_filter, ignore_message),
            Err(PvmError::Exists)
        );
        assert_eq!(
            handlers.add(
                Filter {
                    src: -1,
                    tag: -1,
                    ctx: -1
                },
                ignore_message
            ),
            Err(PvmError::Exists)
        );
        assert_eq!(handlers.remove(9), Ok(()));
        assert_eq!(handlers.remove(9), Err(PvmError::NotFound));
        assert_eq!(handlers.remove(3), Err(PvmError::NotFound));
        assert_eq!(handlers.remove(-1), Err(PvmError::BadParam));
        assert!(handlers.is_empty());
    }
}
