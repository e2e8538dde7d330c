"""What redis does in one step for the pool: the Lua scripts of lease and writes. They are called by `redis_store`.

A script runs whole or, when it refuses, changes nothing: all checks come before the first write. Refusals are errors that begin
with KVFENCED (another epoch or owner leads), KVSTALE (a write that was overtaken) or KVALIEN (a key with what the pool did not
write).

    meta     hash     epoch, owner, address (of the last leader), writes (number of the last write)
    lease    string   the owner, with a time to live
"""

from __future__ import annotations

from typing import Final

_COMMON: Final = """
local function alien(key, wanted)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= wanted then return redis.error_reply('KVALIEN the key ' .. key .. ' is a ' .. found) end
end
local function count(key, field)
  local raw = redis.call('HGET', key, field)
  if not raw then return 0 end
  if not string.match(raw, '^%d+$') or #raw > 15 then
    return nil, redis.error_reply('KVALIEN the field ' .. field .. ' of the key ' .. key .. ' is no number')
  end
  return tonumber(raw)
end
local problem
"""

_LEASE: Final = (
    _COMMON
    + """
local meta, lease = KEYS[1], KEYS[2]
problem = alien(meta, 'hash') or alien(lease, 'string')
if problem then return problem end
local epoch, writes
epoch, problem = count(meta, 'epoch')
if problem then return problem end
writes, problem = count(meta, 'writes')
if problem then return problem end
local owner = redis.call('HGET', meta, 'owner') or ''
local address = redis.call('HGET', meta, 'address') or ''
local holder = redis.call('GET', lease)
"""
)

# KEYS meta, lease; ARGV owner, address, ttl_ms, floor. A lease without an end (nobody of us writes one) is given one. A store
# whose epoch is below one that was seen was set back (a fail-over to a replica that lagged): its lease is void.
TAKE: Final = (
    _LEASE
    + """
if holder and holder ~= ARGV[1] and epoch >= tonumber(ARGV[4]) then
  local left = redis.call('PTTL', lease)
  if left < 0 then
    left = tonumber(ARGV[3])
    redis.call('PEXPIRE', lease, left)
  end
  return {'held', epoch, holder, address, left, writes}
end
local next_epoch = math.max(epoch, tonumber(ARGV[4])) + 1
redis.call('HSET', meta, 'epoch', string.format('%.0f', next_epoch), 'owner', ARGV[1], 'address', ARGV[2])
redis.call('SET', lease, ARGV[1], 'PX', ARGV[3])
return {'taken', next_epoch, ARGV[1], ARGV[2], tonumber(ARGV[3]), writes}
"""
)

# KEYS meta, lease; ARGV owner, epoch, ttl_ms, address. Renews a lease that ran out too, when nobody took it since.
RENEW: Final = (
    _LEASE
    + """
if epoch ~= tonumber(ARGV[2]) or owner ~= ARGV[1] then
  local left = redis.call('PTTL', lease)
  return {'lost', epoch, holder or '', address, math.max(left, 0), writes}
end
redis.call('SET', lease, ARGV[1], 'PX', ARGV[3])
redis.call('HSET', meta, 'address', ARGV[4])
return {'renewed', epoch, owner, ARGV[4], tonumber(ARGV[3]), writes}
"""
)

# KEYS meta, lease; ARGV owner, epoch. Afterwards a renewal that comes late finds another owner.
RELEASE: Final = (
    _LEASE
    + """
if epoch ~= tonumber(ARGV[2]) or owner ~= ARGV[1] then return 0 end
redis.call('HSET', meta, 'owner', '', 'address', '')
if holder == ARGV[1] then redis.call('DEL', lease) end
return 1
"""
)

# All writes: KEYS meta, ...; ARGV owner, epoch, number, ... The number grows by each write of a leader. One that was seen is a
# repetition of the last write, whose answer was lost; a smaller one was held up on the way, its caller has given it up.
_WRITE: Final = (
    _COMMON
    + """
local meta = KEYS[1]
problem = alien(meta, 'hash')
if problem then return problem end
local epoch, writes
epoch, problem = count(meta, 'epoch')
if problem then return problem end
writes, problem = count(meta, 'writes')
if problem then return problem end
local owner = redis.call('HGET', meta, 'owner') or ''
if epoch ~= tonumber(ARGV[2]) or owner ~= ARGV[1] then
  return redis.error_reply('KVFENCED epoch ' .. ARGV[2] .. ' is over, the store has epoch ' .. string.format('%.0f', epoch))
end
local number = tonumber(ARGV[3])
if number < writes then
  return redis.error_reply('KVSTALE write ' .. ARGV[3] .. ' comes after ' .. string.format('%.0f', writes))
end
if number == writes then return number end
"""
)
_DONE: Final = """
redis.call('HSET', meta, 'writes', ARGV[3])
"""

# KEYS meta, namespaces, removal_seqs; ARGV ..., uid, record, removal_seq
PUT_NAMESPACE: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash') or alien(KEYS[3], 'hash')
if problem then return problem end
"""
    + _DONE
    + """
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
redis.call('HSET', KEYS[3], ARGV[4], ARGV[6])
return number
"""
)

# KEYS meta, namespaces, removal_seqs, removals of the namespace, pins; ARGV ..., uid, uid in bytes
DELETE_NAMESPACE: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash') or alien(KEYS[3], 'hash') or alien(KEYS[5], 'hash')
if problem then return problem end
"""
    + _DONE
    + """
redis.call('HDEL', KEYS[2], ARGV[4])
redis.call('HDEL', KEYS[3], ARGV[4])
redis.call('UNLINK', KEYS[4])
for _, name in ipairs(redis.call('HKEYS', KEYS[5])) do
  if string.sub(name, 1, #ARGV[5]) == ARGV[5] then redis.call('HDEL', KEYS[5], name) end
end
return number
"""
)

# KEYS meta, namespaces, pins; ARGV ..., uid, bytes of a name (uid and key), bytes of a value, names each with its value
PUT_PINS: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash') or alien(KEYS[3], 'hash')
if problem then return problem end
if redis.call('HEXISTS', KEYS[2], ARGV[4]) == 0 then return number end
"""
    + _DONE
    + """
local key_bytes, step, packed = tonumber(ARGV[5]), tonumber(ARGV[5]) + tonumber(ARGV[6]), ARGV[7]
for at = 1, #packed, step do
  redis.call('HSET', KEYS[3], string.sub(packed, at, at + key_bytes - 1), string.sub(packed, at + key_bytes, at + step - 1))
end
return number
"""
)

# KEYS meta, pins; ARGV ..., bytes of a name, names
DELETE_PINS: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash')
if problem then return problem end
"""
    + _DONE
    + """
local step, packed = tonumber(ARGV[4]), ARGV[5]
for at = 1, #packed, step do redis.call('HDEL', KEYS[2], string.sub(packed, at, at + step - 1)) end
return number
"""
)

# KEYS like DELETE_NAMESPACE without pins; ARGV ..., uid, seq, first_seq, entry (u64 little-endian seq, u8 kind, keys). Entries
# at the end with this number or a greater one were never confirmed to anybody: the leader's next removal takes their place.
LOG_REMOVAL: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash') or alien(KEYS[3], 'hash') or alien(KEYS[4], 'list')
if problem then return problem end
local log, seq, first_seq = KEYS[4], tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('HEXISTS', KEYS[2], ARGV[4]) == 0 then return number end
local function seq_at(index)
  local entry = redis.call('LINDEX', log, index)
  if not entry then return nil end
  if #entry < 9 then return nil, redis.error_reply('KVALIEN the key ' .. log .. ' has an entry that is no removal') end
  return (struct.unpack('<I8', entry))
end
local ends
for _, index in ipairs({0, -1}) do
  ends, problem = seq_at(index)
  if problem then return problem end
end
"""
    + _DONE
    + """
redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
if first_seq >= seq then redis.call('UNLINK', log) end
while true do
  local last = seq_at(-1)
  if not last or last < seq then break end
  redis.call('RPOP', log)
end
redis.call('RPUSH', log, ARGV[7])
while true do
  local first = seq_at(0)
  if not first or first >= first_seq then break end
  redis.call('LPOP', log)
end
return number
"""
)

# KEYS meta, workers; ARGV ..., worker id, record
PUT_WORKER: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash')
if problem then return problem end
"""
    + _DONE
    + """
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
return number
"""
)

# KEYS meta, workers; ARGV ..., worker id
DELETE_WORKER: Final = (
    _WRITE
    + """
problem = alien(KEYS[2], 'hash')
if problem then return problem end
"""
    + _DONE
    + """
redis.call('HDEL', KEYS[2], ARGV[4])
return number
"""
)
