//! The assignment of queues to workers.

use mqblk_core::settings::{SettingError, Settings};

const KEY: &str = "queue-map";

/// Assigns `queues` to `workers` round-robin, continuing after the previous disk's last worker: otherwise all disks of one queue
/// would share worker 0.
pub fn round_robin(next_worker: &mut u16, queues: u16, workers: u16) -> Vec<u16> {
    let mut map = Vec::with_capacity(usize::from(queues));
    for _ in 0..queues {
        map.push(*next_worker);
        *next_worker = (*next_worker + 1) % workers;
    }
    map
}

/// Parses `QUEUE:WORKER,...`. Each of the `queues` queues must appear once.
///
/// # Errors
/// If the text has another form, names a queue or worker that does not exist, or omits a queue.
pub fn parse(settings: &Settings, text: &str, queues: u16, workers: u16) -> Result<Vec<u16>, SettingError> {
    let mut map: Vec<Option<u16>> = vec![None; usize::from(queues)];
    for pair in text.split(',') {
        let numbers = pair.split_once(':').and_then(|(queue, worker)| Some((number(queue)?, number(worker)?)));
        let Some((queue, worker)) = numbers else {
            return Err(settings.error(
                KEY,
                format!("{pair:?}"),
                "QUEUE:WORKER pairs separated by commas, such as 0:0,1:1",
            ));
        };
        if worker >= workers {
            return Err(settings.error(KEY, format!("worker {worker}"), format!("workers from 0 to {}", workers - 1)));
        }
        match map.get_mut(usize::from(queue)) {
            None => {
                return Err(settings.error(KEY, format!("queue {queue}"), format!("queues from 0 to {}", queues - 1)));
            }
            Some(Some(_)) => return Err(settings.error(KEY, format!("queue {queue} twice"), "each queue once")),
            Some(slot) => *slot = Some(worker),
        }
    }
    if let Some(queue) = map.iter().position(Option::is_none) {
        return Err(settings.error(
            KEY,
            format!("no worker for queue {queue}"),
            format!("one for each of the {queues} queues"),
        ));
    }
    Ok(map.into_iter().flatten().collect())
}

fn number(text: &str) -> Option<u16> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Formats the map for [`parse`].
pub fn display(map: &[u16]) -> String {
    let pairs: Vec<String> = map.iter().enumerate().map(|(queue, worker)| format!("{queue}:{worker}")).collect();
    pairs.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_continues_across_disks() {
        let mut next = 0;
        assert_eq!(round_robin(&mut next, 3, 2), [0, 1, 0]);
        assert_eq!(round_robin(&mut next, 2, 2), [1, 0]);
        let mut next = 0;
        assert_eq!(round_robin(&mut next, 3, 1), [0, 0, 0]);
    }

    #[test]
    fn maps_round_trip() {
        let settings = Settings::new("disk");
        for (text, queues, workers) in [("0:0", 1, 1), ("0:1,1:0", 2, 2), ("0:0,1:0,2:3", 3, 4)] {
            assert_eq!(display(&parse(&settings, text, queues, workers).unwrap()), text);
        }
        assert_eq!(parse(&settings, "1:0,0:1", 2, 2).unwrap(), [1, 0]);
    }
}
